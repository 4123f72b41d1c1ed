"""The recipes that are shipped: YAML files, found by name with `lmpress list recipes`."""
