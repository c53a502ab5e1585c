"""What the daemon on this machine does: once (`status`), and again and again (`top`)."""
