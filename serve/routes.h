// Which path is answered how, and who may ask.
#pragma once

#include <string>
#include <vector>

#include "serve/http.h"
#include "serve/service.h"

struct Access {
    std::string host = "127.0.0.1";    // that the server listens on
    std::vector<std::string> keys;     // empty: everybody may ask
    std::vector<std::string> origins;  // other web pages that may ask (--cors-origin); "*": all
};

class Routes {
  public:
    Routes(Service& service, Access access);
    void answer(const http::Request& request, const std::shared_ptr<http::Reply>& reply);

  private:
    std::string answer_to(const http::Request& request, const std::shared_ptr<http::Reply>& reply);
    void complete(const http::Request& request, const std::shared_ptr<http::Reply>& reply, bool chat, int64_t key);
    void check_host(const http::Request& request) const;
    void check_origin(const http::Request& request, http::Reply& reply) const;
    int64_t key_of(const http::Request& request) const;

    Service& service;
    const Access access;
};

// The keys of a file, one a line; empty lines are left out. Throws Error for a file without any.
std::vector<std::string> read_keys(const std::string& path);
// Body of an answer 413.
std::string too_large_body();
