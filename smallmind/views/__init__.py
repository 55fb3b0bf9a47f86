"""What people look at: curves, reports, a run while it trains. Nothing here writes to a run."""
