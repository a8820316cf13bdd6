"""What keeps the repository: nothing of it is part of the package."""
