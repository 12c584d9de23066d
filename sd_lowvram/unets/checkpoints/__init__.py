"""UNets that lost layers, or have others, as files and folders."""
