"""Programs and predictions of plans for clusters that need not be here."""
