"""Lowering: from a plan to tasks as jitted functions, the program, the job, and compilation."""
