// SIGINT and SIGTERM ask a run to stop at the end of its step; a second one ends the process at once.
#pragma once

void catch_stop_signals();
bool stop_requested();
