"""What a family's table is made of, and how it expands into exact names and shapes."""
