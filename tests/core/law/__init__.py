"""Random unit programs, and the law they are held to."""
