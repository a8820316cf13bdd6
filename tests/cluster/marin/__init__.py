"""Tests that need the packages of Marin, which live in an environment of their own: `make marin`."""
