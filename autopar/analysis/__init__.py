"""What a plan means for the equations of its step."""
