"""Plans and predictions compared with compiled programs, measurements and published results."""
