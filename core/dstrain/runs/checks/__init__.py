"""What a resolved run cannot do or does not read, found before anything is loaded."""
