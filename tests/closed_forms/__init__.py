"""What layers save in closed form: an oracle for the planner, which measures it."""
