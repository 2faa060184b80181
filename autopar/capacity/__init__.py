"""Whether a step fits into memory, what is the most that fits, and what would make it fit."""
