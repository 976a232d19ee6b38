"""Watch a run: previews while it trains, and trackers that its numbers are sent to."""
