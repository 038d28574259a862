"""What one run needs, from one YAML file: the recipe, its schema, options of the workflows."""
