"""The room that places requests: pure policies, one state machine, one service."""
