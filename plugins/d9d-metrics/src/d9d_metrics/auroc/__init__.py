"""Area under the ROC curve, computed with bins."""
