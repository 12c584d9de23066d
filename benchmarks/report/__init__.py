"""One page that shows what this machine does: measurements collected, drawn, and held against what is claimed."""
