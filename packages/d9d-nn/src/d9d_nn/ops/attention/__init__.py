"""Op ``attention``: reference, slot and backends."""
