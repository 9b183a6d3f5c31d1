"""A source recognised, opened and judged: headers, evidence, what it holds and where."""
