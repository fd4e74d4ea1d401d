"""A fleet of stub engines, and what the rollout process costs in front of it."""
