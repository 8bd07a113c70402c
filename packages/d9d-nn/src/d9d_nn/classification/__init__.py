"""Classification of samples and of tokens: the tasks ``classification`` and ``token_classification``."""
