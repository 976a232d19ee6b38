"""What a run prints, logs and previews."""
