"""A feed-forward of experts: the router, the dispatch of tokens, the experts, and what balances their load."""
