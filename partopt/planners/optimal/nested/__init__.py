"""Plans of pipelines inside the members of a level, replicated over the members."""
