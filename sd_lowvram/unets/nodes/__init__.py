"""Nodes for ComfyUI, which lie in a pack beside this package: ``nodes/`` has what all share."""
