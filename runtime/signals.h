// SIGINT and SIGTERM ask a run to stop at the end of its step; a second one ends the process at once.
#pragma once

void catch_stop_signals();
bool stop_requested();

// SIGINT alone, for as long as something is done that it should stop and not the program; stop_requested() tells.
void catch_interrupt();
void release_interrupt();
