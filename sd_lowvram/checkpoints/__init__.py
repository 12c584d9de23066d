"""Reading models from files: headers, configurations, weights."""
