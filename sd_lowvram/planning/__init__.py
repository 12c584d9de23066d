"""What is asked of the planner."""
