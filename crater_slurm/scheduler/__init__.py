"""crater-scheduler: answers the submit filter, keeps a picture of the cluster, serves the API."""
