"""What commands do with a world model outside the loop: fit it, measure trust in it, rank policies by it."""
