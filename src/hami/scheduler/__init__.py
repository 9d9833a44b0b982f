"""ClusterState, placement, policies and quota; around them the HTTP edge: extender, webhook, bind, metrics."""
