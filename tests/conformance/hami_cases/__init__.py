"""Runs recorded cases (inputs and HAMi's answers) against our code and says where they differ."""
