"""The commands of the command line, one file each. Heavy packages are imported when a command runs, not before."""
