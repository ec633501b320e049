"""One builder per kind: from a resource to the object that the operator applies."""
