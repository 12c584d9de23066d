"""The planner: from a request to a plan."""
