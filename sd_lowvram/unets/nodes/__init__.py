"""ComfyUI nodes for several UNets; ``nodes/`` of the pack has the common parts of all nodes."""
