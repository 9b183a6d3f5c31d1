"""What is compared between the two sides, and the verdict."""
