"""Tests on real images, videos and tokenizers; `make test-real` fetches them."""
