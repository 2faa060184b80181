"""From a plan to what runs: tasks as jitted functions, the program, the job, and compilation for clusters that are not here."""
