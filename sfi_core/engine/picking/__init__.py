"""Picking the next tokens: scores, and draws by index-keyed noise."""
