"""What a run saves, and how a run resumes from it."""
