"""UNets with fewer or other layers than published ones, as files and folders."""
