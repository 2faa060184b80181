"""Pictures and tables of timelines and predictions."""
