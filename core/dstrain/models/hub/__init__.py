"""Find published models on this machine and on hubs, and download them."""
