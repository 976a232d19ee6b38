"""What lies in the folder of a feature cache."""
