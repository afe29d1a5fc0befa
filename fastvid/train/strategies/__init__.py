"""How replicas agree: one folder a strategy, each named by an import string."""
