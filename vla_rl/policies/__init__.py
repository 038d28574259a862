"""Policy families."""
