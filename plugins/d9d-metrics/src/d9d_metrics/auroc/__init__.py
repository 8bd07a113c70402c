"""Area under the ROC curve, by bins."""
