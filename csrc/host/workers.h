// Threads that outlive calls, because starting one takes as long as copying a small array.
#pragma once

#include <functional>

namespace cuops {

// Runs `work` on the calling thread and on up to `others` more at once; returns when all that began have ended.
void run_together(unsigned others, const std::function<void()>& work);

}  // namespace cuops
