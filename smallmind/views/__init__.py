"""What people look at: curves, reports, views of a run while it trains. Nothing here writes to it."""
