"""Tests on real pictures, videos and tokenizers; `make test-real` fetches them."""
