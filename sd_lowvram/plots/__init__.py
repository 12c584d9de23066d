"""Charts, one a file. Drawn without a window, so that programs with a display of their own can use them."""
